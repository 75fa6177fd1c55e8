"""Slow, obvious definitions of every geometric measure, written without sight of the fast code.

All functions take X (n, d), work in float64 and return a Python float unless the docstring says otherwise.
`sigma` are singular values of the centred matrix, `lambda = sigma^2 / (n-1)` eigenvalues of its covariance S.
Where a formula is undefined (equal rows, a zero row, a zero step) the oracle raises ZeroDivisionError or ValueError
instead of choosing a value; scalars become Python floats before dividing, so that they raise and never give NaN.
"""

import itertools
import math

import numpy as np
from scipy.optimize import minimize_scalar
from scipy.special import betaln


def centred(X):
    """x_i - mean(x), as float64 (n, d). Returns an array."""
    X = np.asarray(X, dtype=np.float64)
    return X - X.mean(axis=0)


def singular_values(X):
    """Singular values of the centred matrix, descending, as a list of min(n, d) floats."""
    return [float(s) for s in np.linalg.svd(centred(X), compute_uv=False)]


def covariance(X):
    """S = sum_i (x_i - m)(x_i - m)^T / (n - 1), an array (d, d)."""
    Y = centred(X)
    return sum(np.outer(y, y) for y in Y) / (len(Y) - 1)


def spectral_ratio(X):
    """lambda_1 / sum lambda = sigma_1^2 / sum sigma^2, centred."""
    s = singular_values(X)
    return s[0] ** 2 / math.fsum(v**2 for v in s)


def spectral_ratio_l1(X):
    """sigma_1 / sum sigma, centred."""
    s = singular_values(X)
    return s[0] / math.fsum(s)


def stable_rank(X):
    """sum lambda / lambda_1, centred."""
    s = singular_values(X)
    return math.fsum(v**2 for v in s) / s[0] ** 2


def exp_entropy(weights):
    """exp(-sum p ln p) with p = w / sum w, and 0 ln 0 = 0."""
    total = math.fsum(weights)
    p = [w / total for w in weights]
    return math.exp(-math.fsum(q * math.log(q) for q in p if q > 0))


def effective_rank(X):
    """exp(-sum p ln p), p = sigma / sum sigma, centred (Roy and Vetterli)."""
    return exp_entropy(singular_values(X))


def effective_rank_lambda(X):
    """exp(-sum p ln p), p = lambda / sum lambda, centred."""
    return exp_entropy([v**2 for v in singular_values(X)])


def mean_cosine(X):
    """Mean over ordered pairs i != j of x_i.x_j / (|x_i| |x_j|), not centred."""
    X = np.asarray(X, dtype=np.float64)
    n = len(X)
    length = [float(np.linalg.norm(x)) for x in X]
    cosines = [float(X[i] @ X[j]) / (length[i] * length[j]) for i in range(n) for j in range(n) if i != j]
    return math.fsum(cosines) / len(cosines)


def participation_ratio_plugin(X):
    """tr(S)^2 / ||S||_F^2 = (sum sigma^2)^2 / sum sigma^4, centred."""
    s = singular_values(X)
    return math.fsum(v**2 for v in s) ** 2 / math.fsum(v**4 for v in s)


def participation_ratio_corrected(X):
    """Ratio of the U-statistics of (tr Sigma)^2 and tr(Sigma^2): averages over all ordered (i,j,k,l), all distinct.

    Let a = x_i - x_j and b = x_k - x_l. Four distinct indices make a and b independent, each with mean 0 and
    E[a a^T] = Sigma + Sigma = 2 Sigma (the cross terms have mean zero after the common mean cancels). Hence
      E[(a.b)^2] = E[tr(a a^T b b^T)] = tr(E[a a^T] E[b b^T]) = 4 tr(Sigma^2),
      E[|a|^2 |b|^2] = tr E[a a^T] * tr E[b b^T] = (2 tr Sigma)^2 = 4 (tr Sigma)^2,
    for any law with second moments, so (a.b)^2 / 4 and |a|^2 |b|^2 / 4 are unbiased kernels. The ratio itself is not
    unbiased, and can exceed d. n (n-1) (n-2) (n-3) terms: keep n <= 12.
    """
    X = np.asarray(X, dtype=np.float64)
    trace_squared, trace_of_square = [], []
    for i, j, k, m in itertools.permutations(range(len(X)), 4):
        a, b = X[i] - X[j], X[k] - X[m]
        trace_squared.append(float(a @ a) * float(b @ b) / 4)
        trace_of_square.append(float(a @ b) ** 2 / 4)
    return (math.fsum(trace_squared) / len(trace_squared)) / (math.fsum(trace_of_square) / len(trace_of_square))


def isoscore_published(X):
    """The published IsoScore, step by step.

    1. reorient by PCA; 2. take the diagonal l of the covariance of the reoriented points; 3. lhat = sqrt(D) l / ||l||;
    4. defect delta = ||lhat - 1|| / sqrt(2 (D - sqrt D)); 5. ((D - delta^2 (D - sqrt D))^2 - D) / (D (D - 1)).
    """
    Y = centred(X)
    D = Y.shape[1]
    _, _, Vt = np.linalg.svd(Y, full_matrices=True)
    diagonal = [float(v) for v in np.diag(covariance(Y @ Vt.T))]
    lhat = [math.sqrt(D) * v / math.hypot(*diagonal) for v in diagonal]
    delta = math.hypot(*[v - 1 for v in lhat]) / math.sqrt(2 * (D - math.sqrt(D)))
    return ((D - delta**2 * (D - math.sqrt(D))) ** 2 - D) / (D * (D - 1))


def isoscore_star(X, zeta, reference=None):
    """(PR(M) - 1) / (D - 1), M = (1-zeta) S + zeta S_ref, S over n-1, S_ref = `reference` (d, d) or (tr S / D) I."""
    S = covariance(X)
    D = len(S)
    S_ref = float(np.trace(S)) / D * np.eye(D) if reference is None else np.asarray(reference, dtype=np.float64)
    M = (1 - zeta) * S + zeta * S_ref
    ratio = float(np.trace(M)) ** 2 / float(np.sum(M**2))
    return (ratio - 1) / (D - 1)


def partition_isotropy(X):
    """min_c Z / max_c Z, Z(c) = sum_i exp(c.x_i), c over +- all D unit eigenvectors of X^T X (null ones too)."""
    X = np.asarray(X, dtype=np.float64)
    _, _, Vt = np.linalg.svd(X, full_matrices=True)
    log_z = []
    for c in [*Vt, *-Vt]:
        exponents = [float(c @ x) for x in X]
        shift = max(exponents)
        log_z.append(shift + math.log(math.fsum(math.exp(e - shift) for e in exponents)))
    return math.exp(min(log_z) - max(log_z))


def ranked(X, i):
    """List of (|x_j - x_i|, j) over all j != i, ascending; self left out by index, ties by index."""
    return sorted((float(np.sqrt(np.sum((X[j] - X[i]) ** 2))), j) for j in range(len(X)) if j != i)


def neighbors(X, k):
    """(distances (n, k) ascending, indices (n, k)) of the k nearest other rows, by differences of all pairs."""
    X = np.asarray(X, dtype=np.float64)
    nearest = [ranked(X, i)[:k] for i in range(len(X))]
    return np.array([[r for r, _ in row] for row in nearest]), np.array([[j for _, j in row] for row in nearest])


def slope_through_origin(x, y):
    """argmin_b sum (y - b x)^2 = sum x y / sum x^2."""
    return math.fsum(a * b for a, b in zip(x, y, strict=True)) / math.fsum(a * a for a in x)


def two_nn_facco(X):
    """Slope through the origin of -log(1 - F_i) on log mu_i: mu = r2/r1 ascending, F_i = i/N, i = 1..int(0.9 N)."""
    r, _ = neighbors(X, 2)
    N = len(r)
    mu = sorted(float(r2) / float(r1) for r1, r2 in r)
    keep = int(0.9 * N)
    x = [math.log(mu[i]) for i in range(keep)]
    return slope_through_origin(x, [-math.log(1 - (i + 1) / N) for i in range(keep)])


def two_nn_ml(X):
    """(N - 1) / sum_i log(r2(i) / r1(i))."""
    r, _ = neighbors(X, 2)
    return (len(r) - 1) / math.fsum(math.log(float(r2) / float(r1)) for r1, r2 in r)


def two_nn_shape_of_learning(X):
    """TwoNN as in "The Shape of Learning", on one batch.

    1. centre; divide by the mean row length. 2. r1, r2 against all other rows; r1 < 1e-8 is bad; mu = r2/r1.
    3. remove bad rows and rows with mu <= 1 + 1e-8: u of them. 4. the n left, ascending, have F_i = (u+i)/(u+n),
    i = 1..n. 5. on the first min(n//5, n-1): slope through the origin of -log(1-F) on log mu.
    """
    Y = centred(X)
    Y = Y / (math.fsum(float(np.linalg.norm(y)) for y in Y) / len(Y))
    r, _ = neighbors(Y, 2)
    mu = sorted(float(r2 / r1) for r1, r2 in r if r1 >= 1e-8 and r2 / r1 > 1 + 1e-8)
    n, u = len(mu), len(r) - len(mu)
    keep = min(n // 5, n - 1)
    F = [(u + i) / (u + n) for i in range(1, n + 1)]
    return slope_through_origin([math.log(mu[i]) for i in range(keep)], [-math.log(1 - F[i]) for i in range(keep)])


def mle(X, k):
    """Levina-Bickel pooled as MacKay and Ghahramani: N (k-1) / sum_i sum_{j<k} log(r_k(i) / r_j(i))."""
    r, _ = neighbors(X, k)
    logs = [math.log(float(row[k - 1]) / float(row[j])) for row in r for j in range(k - 1)]
    return len(r) * (k - 1) / math.fsum(logs)


def mle_levina_bickel(X, k):
    """Mean over i of [ (1/(k-1)) sum_{j<k} log(r_k(i) / r_j(i)) ]^-1."""
    r, _ = neighbors(X, k)
    inverse = [math.fsum(math.log(float(row[k - 1]) / float(row[j])) for j in range(k - 1)) / (k - 1) for row in r]
    return math.fsum(1 / v for v in inverse) / len(r)


def gride(X, n1, n2=None):
    """argmax_d sum_i log f(mu_i), mu = r_{n2}/r_{n1}, n2 = 2 n1 by default, with (N-1) log d in place of N log d.

    For n1 = 1 that is (N-1) / sum log mu, the unbiased form of TwoNN's maximum likelihood.
    f(mu) = d (mu^d - 1)^(n2-n1-1) / (B(n2-n1, n1) mu^((n2-1)d+1)). Each log f is concave in d: one maximum.
    log(mu^d - 1) is written d log mu + log(1 - mu^-d). A maximum found from values is good to about 1e-7 relative.
    """
    n2 = 2 * n1 if n2 is None else n2
    r, _ = neighbors(X, n2)
    log_mu = [math.log(float(row[n2 - 1]) / float(row[n1 - 1])) for row in r]

    def minus_log_likelihood(d):
        terms = [(len(log_mu) - 1) * math.log(d)]
        terms += [-betaln(n2 - n1, n1) - ((n2 - 1) * d + 1) * w for w in log_mu]
        if n2 - n1 > 1:
            terms += [(n2 - n1 - 1) * (d * w + math.log(-math.expm1(-d * w))) for w in log_mu]
        return -math.fsum(terms)

    tight = {"xatol": 1e-11, "maxiter": 1000}
    found = minimize_scalar(minus_log_likelihood, bounds=(1e-3, 1e3), method="bounded", options=tight)
    if not 2e-3 < found.x < 999:
        raise ValueError(f"gride oracle: the maximum {found.x} lies at a bound of the search")
    return float(found.x)


def turning_angle(X):
    """Mean over t of the angle in degrees between a = x[t+1]-x[t] and b = x[t+2]-x[t+1].

    For unit vectors the angle is 2 atan2(|a - b|, |a + b|): the same as arccos(a.b), without its loss near 0 and 180.
    """
    X = np.asarray(X, dtype=np.float64)
    angles = []
    for t in range(len(X) - 2):
        a, b = X[t + 1] - X[t], X[t + 2] - X[t + 1]
        if not (a.any() and b.any()):
            raise ValueError(f"turning_angle oracle: zero step at t = {t}")
        a, b = a / np.linalg.norm(a), b / np.linalg.norm(b)
        angles.append(math.degrees(2 * math.atan2(float(np.linalg.norm(a - b)), float(np.linalg.norm(a + b)))))
    return math.fsum(angles) / len(angles)


def linearity(X, Y):
    """1 - min_A ||Xc A - Yc||_F^2 / ||Yc||_F^2, both centred."""
    Xc, Yc = centred(X), centred(Y)
    A = np.linalg.lstsq(Xc, Yc, rcond=None)[0]
    return 1 - float(np.sum((Xc @ A - Yc) ** 2)) / float(np.sum(Yc**2))


def linearity_adjusted(X, Y):
    """1 - (1 - R2) (n-1) / (n-r-1), R2 = linearity(X, Y), r = rank of the centred X."""
    Xc = centred(X)
    n, r = len(Xc), int(np.linalg.matrix_rank(Xc))
    return 1 - (1 - linearity(X, Y)) * (n - 1) / (n - r - 1)


def linearity_orthogonal(X, Y):
    """max over orthogonal Q and scale s of 1 - ||s Xc Q - Yc||^2 / ||Yc||^2 = ||Xc^T Yc||_*^2 / (||Xc||^2 ||Yc||^2).

    max_Q tr(Q^T Xc^T Yc) is the nuclear norm; then s = ||Xc^T Yc||_* / ||Xc||^2. Unequal widths: pad with zeros, which
    changes none of the three norms.
    """
    Xc, Yc = centred(X), centred(Y)
    nuclear = math.fsum(float(s) for s in np.linalg.svd(Xc.T @ Yc, compute_uv=False))
    return nuclear**2 / (float(np.sum(Xc**2)) * float(np.sum(Yc**2)))


def neighbourhood(X, anchor, k):
    """Row `anchor`, then its k nearest other rows, as an array (k+1, d)."""
    X = np.asarray(X, dtype=np.float64)
    return X[[anchor] + [j for _, j in ranked(X, anchor)[:k]]]


def local_pca_spectra(X, anchors, k):
    """List by anchor: D eigenvalues, descending, of the covariance (over k, about the mean) of anchor + k nearest."""
    spectra = []
    for anchor in anchors:
        P = neighbourhood(X, anchor, k)
        eigenvalues = [s**2 / k for s in singular_values(P)]
        spectra.append(np.array(eigenvalues + [0.0] * (P.shape[1] - len(eigenvalues))))
    return spectra


def second_fundamental_form(X, anchor, k, dimension):
    """II (n_normals, d, d) at one anchor: normal coordinates = c + linear(t) + II(t, t)/2, by least squares.

    Frames: right singular vectors of anchor + k neighbours about their mean; the first d are tangent, the later ones
    with nonzero singular value normal. Coordinates are relative to the anchor (one of the k+1 rows). Columns 1, t_a,
    t_a t_b (a <= b); II_aa = 2 coef(t_a^2), II_ab = coef(t_a t_b). Signs (at ties, rotations) of frames are arbitrary.
    """
    P = neighbourhood(X, anchor, k)
    _, s, Vt = np.linalg.svd(centred(P), full_matrices=False)
    nonzero = int(np.sum(s > s[0] * max(P.shape) * np.finfo(np.float64).eps))
    tangent, normal = Vt[:dimension].T, Vt[dimension:nonzero].T
    t, z = (P - P[0]) @ tangent, (P - P[0]) @ normal
    pairs = [(a, b) for a in range(dimension) for b in range(a, dimension)]
    if len(P) < 1 + dimension + len(pairs):
        raise ValueError(f"second_fundamental_form oracle: {len(P)} points, {1 + dimension + len(pairs)} coefficients")
    columns = [np.ones(len(P))] + [t[:, a] for a in range(dimension)] + [t[:, a] * t[:, b] for a, b in pairs]
    II = np.zeros((normal.shape[1], dimension, dimension))
    for m in range(normal.shape[1]):
        coefficients = np.linalg.lstsq(np.stack(columns, axis=1), z[:, m], rcond=None)[0]
        for (a, b), c in zip(pairs, coefficients[1 + dimension :], strict=True):
            II[m, a, b] = II[m, b, a] = 2 * c if a == b else c
    return II


def visible_curvature(X, anchors, k, dimension):
    """sum |x_N|^2 / sum |x_T|^2 over anchors and k neighbours; x from the anchor, x_T = T T^T x, x_N = x - x_T."""
    normal, tangent = [], []
    for anchor in anchors:
        P = neighbourhood(X, anchor, k)
        _, _, Vt = np.linalg.svd(centred(P), full_matrices=False)
        T = Vt[:dimension].T
        for x in P[1:] - P[0]:
            x_T = T @ (T.T @ x)
            tangent.append(float(np.sum(x_T**2)))
            normal.append(float(np.sum((x - x_T) ** 2)))
    return math.fsum(normal) / math.fsum(tangent)


def moments(X):
    """Dict: count n, mean m, scatter sum y y^T (d, d), third sum |y|^2 y (d,), fourth sum |y|^4; y = x - m."""
    Y, mean = centred(X), np.asarray(X, dtype=np.float64).mean(axis=0)
    scatter, third = sum(np.outer(y, y) for y in Y), sum(float(y @ y) * y for y in Y)
    fourth = math.fsum(float(y @ y) ** 2 for y in Y)
    return {"count": len(Y), "mean": mean, "scatter": scatter, "third": third, "fourth": fourth}


def self_check():
    """Cases with answers worked out by hand, or by a second route; raises on the first that is wrong."""

    def check(name, got, want, rtol=1e-9, atol=1e-12):
        np.testing.assert_allclose(got, want, rtol=rtol, atol=atol, err_msg=name)
        print("ok", name)

    rng = np.random.default_rng(0)
    # Rows +-s_a e_a / sqrt 2 about a shift: singular values (10, 2, 1), sum 13, squares (100, 4, 1), sum 105.
    A = np.concatenate([np.diag([10.0, 2, 1]), -np.diag([10.0, 2, 1])]) / math.sqrt(2) + 7.0
    check("spectral_ratio", [spectral_ratio_l1(A), spectral_ratio(A), stable_rank(A)], [10 / 13, 100 / 105, 1.05])
    ranks = [13 / (10**10 * 2**2) ** (1 / 13), 105 / (100**100 * 4**4) ** (1 / 105)]
    check("effective_rank", [effective_rank(A), effective_rank_lambda(A)], ranks)
    pr = 105**2 / (100**2 + 4**2 + 1**2)
    check("participation_ratio_plugin", participation_ratio_plugin(A), pr)
    check("isoscore", [isoscore_published(A), isoscore_star(A, 0.0)], (pr - 1) / 2)
    check("isoscore_star one", [isoscore_star(A, 1.0), isoscore_star(A, 1.0, np.diag([1.0, 1, 0]))], [1, 0.5])
    check("isoscore_star half", isoscore_star(A, 0.5), (105**2 / (67.5**2 + 19.5**2 + 18**2) - 1) / 2)
    check("moments", [moments(A)["fourth"], moments([[0.0], [0], [3]])["third"][0]], [2 * (50**2 + 2**2 + 0.5**2), 6])
    two, three = mean_cosine([[3.0, 0], [0, 2]]), mean_cosine([[1.0, 0], [0, 2], [3, 3]])
    check("mean_cosine", [two, three], [0, math.sqrt(2) / 3])
    check("partition_isotropy", partition_isotropy([[1.0, 0], [0, 0.5]]), (1 + math.exp(-1)) / (1 + math.e))
    cross = [[900.0, 0], [-900, 0], [0, 899.5], [0, -899.5]]  # Z overflows, the ratio does not
    check("partition_isotropy large", partition_isotropy(cross), math.exp(-0.5))
    # A second route to the corrected ratio: products of uncentred inner products over distinct indices.
    X, tt, t2 = rng.standard_normal((7, 3)) * [3, 1, 0.5] + 5, 0.0, 0.0
    G = X @ X.T
    for i, j, k, m in itertools.permutations(range(7), 4):
        tt += G[i, i] * G[j, j] - 2 * G[i, i] * G[j, k] + G[i, j] * G[k, m]
        t2 += G[i, j] ** 2 - 2 * G[i, j] * G[i, k] + G[i, j] * G[k, m]
    check("participation_ratio_corrected", participation_ratio_corrected(X), tt / t2, rtol=1e-7)
    # On a line, 0 1 3 7 have distances (1, 3, 7), (1, 2, 6), (2, 3, 4), (4, 6, 7): product of mu 3 * 2 * 1.5 * 1.5.
    line = np.array([[0.0], [1], [3], [7]])
    check("neighbors", neighbors(line, 2), [[[1, 3], [1, 2], [2, 3], [4, 6]], [[1, 2], [0, 2], [1, 0], [2, 1]]])
    check("two_nn_ml", two_nn_ml(line), 3 / math.log(13.5))
    check("mle", mle(line, 3), 8 / math.log((7 * 7 / 3) * (6 * 6 / 2) * (4 / 2 * 4 / 3) * (7 / 4 * 7 / 6)))
    check("mle_levina_bickel", mle_levina_bickel(line, 2), sum(1 / math.log(v) for v in (3, 2, 1.5, 1.5)) / 4)
    check("gride n1=1", gride(line, 1), 3 / math.log(13.5), rtol=1e-6)
    a, b = math.log(1.5), math.log(2)  # facco keeps int(3.6) = 3: F = 1/4, 2/4, 3/4 at mu = 1.5, 1.5, 2
    check("two_nn_facco", two_nn_facco(line), (a * -math.log(0.75) + a * b + b * 2 * b) / (2 * a * a + b * b))
    # Two equal rows, u = 2; the others have mu 3, 2, 1.5, 1.5, 1.5; one point is used, F = 3/7 at mu = 1.5.
    twins = np.array([[0.0], [0], [10], [11], [13], [17], [25]])
    check("two_nn_shape_of_learning", two_nn_shape_of_learning(twins), math.log(7 / 4) / math.log(1.5))
    flat = rng.random((200, 2))  # gride: the score (N-1)/d + sum [3 w / (1 - mu^-d) - 7 w] vanishes at the maximum
    d, w = gride(flat, 4), np.log(neighbors(flat, 8)[0][:, 7] / neighbors(flat, 8)[0][:, 3])
    check("gride score", 199 / 200 / d + np.mean(3 * w / (1 - np.exp(-d * w)) - 7 * w), 0, atol=1e-6)
    check("plane", [two_nn_ml(flat), two_nn_facco(flat), d, mle(flat, 10)], 2, rtol=0.25)
    check("turning_angle", turning_angle([[0.0, 0], [1, 0], [1, 1], [1, 2], [1, 1]]), (90 + 0 + 180) / 3)
    X, M = rng.standard_normal((20, 3)), rng.standard_normal((3, 3))
    Y = X @ M + rng.standard_normal((20, 3))
    check("linearity exact", [linearity(X, X @ M + 2), linearity_orthogonal(X, 5 * X @ np.linalg.qr(M)[0])], 1)
    x, y = [[-1.0], [0], [1]], [[-1.0], [1], [2]]  # slope 3/2, R2 = 4.5 / (14/3) = 27/28; adjusted 1 - 2/28
    check("linearity by hand", [linearity(x, y), linearity_adjusted(x, y)], [27 / 28, 26 / 28])
    U, s, Vt = np.linalg.svd(centred(X).T @ centred(Y))  # Procrustes by its residual
    residual = s.sum() / np.sum(centred(X) ** 2) * centred(X) @ U @ Vt - centred(Y)
    check("linearity_orthogonal", linearity_orthogonal(X, Y), 1 - np.sum(residual**2) / np.sum(centred(Y) ** 2))
    # Circle of radius R at angles h apart: the neighbours of an anchor lie at x_T = +-R sin h, x_N = R (1 - cos h).
    R, h = 3.0, 0.01
    circle = R * np.stack([np.cos(h * np.arange(-8, 9)), np.sin(h * np.arange(-8, 9))], axis=1)
    check("circle, |II| = 1/R", abs(second_fundamental_form(circle, 8, 16, 1)).ravel(), [1 / R], rtol=5e-3)
    check("circle, visible", visible_curvature(circle, [8], 2, 1), ((1 - math.cos(h)) / math.sin(h)) ** 2)
    spectrum = [(R * math.sin(h)) ** 2, (R * (1 - math.cos(h))) ** 2 / 3]
    check("circle, local spectrum", local_pca_spectra(circle, [8], 2)[0], spectrum, rtol=1e-7)
    # Saddle z = x y: II = [[0, 1], [1, 0]] up to frames, so norm sqrt 2 and trace 0.
    g = np.array([[x, y] for x in range(-2, 3) for y in range(-2, 3)]) * 0.01
    II = second_fundamental_form(np.column_stack([g, g[:, 0] * g[:, 1]]), 12, 24, 2)
    check("saddle", [np.linalg.norm(II), np.trace(II[0])], [math.sqrt(2), 0], rtol=1e-6, atol=1e-6)


if __name__ == "__main__":
    self_check()
