"""Recipes: those that come with the package, and mistakes told in one line with file, line and place."""

import math
from itertools import pairwise

import pytest
import yaml

from anisoscope.errors import OptionError, UnknownNameError
from anisoscope.train.checkpoints import checkpoint_steps
from anisoscope.train.optimise import learning_rate
from anisoscope.train.recipe import CheckpointSpec, OptimisationSpec, load_recipe, override, parse_recipe, recipe_names

TEXT = """\
name: tiny
data:
  tokenizer: {kind: bpe, vocab_size: 300}
  sequence_length: 32
models:
  - name: one
    architecture: gpt2
    objective: causal
    layers: 2
    width: 32
    heads: 4
optimisation:
  steps: 10
  batch_size: 4
  lr: 1e-3
monitor: {tangent: {rank: 8}}
"""


def test_the_recipes_of_the_package_load():
    names = {"demo", "shape-of-learning", "tangent", "mask-ablation", "attention-ablation", "char-vs-bpe"}
    names |= {"frequency", "regularizers", "zipf-languages"}
    assert names == set(recipe_names())
    for name in names:
        recipe = load_recipe(name)
        assert recipe.name == name and recipe.about
        assert parse_recipe(yaml.safe_dump(recipe.describe())) == recipe


def test_pairs_of_a_study_differ_in_one_thing():
    masks = {m.name: m.model(100, 8) for m in load_recipe("mask-ablation").models}
    assert masks["causal"] == masks["masked-with-mask"]
    assert masks["masked-no-mask"].model_copy(update={"causal": True}) == masks["causal"]
    attention = [m.model(100, 8) for m in load_recipe("attention-ablation").models]
    assert len({a.model_copy(update={"attention": "full"}) for a in attention}) == 1
    assert {a.attention for a in attention} == {"full", "uniform", "none"}


def test_the_objective_decides_on_the_mask_unless_told(tmp_path):
    assert parse_recipe(TEXT).variant("one").causal
    assert not parse_recipe(TEXT.replace("objective: causal", "objective: masked")).variant("one").causal
    both = TEXT.replace("objective: causal", "objective: masked\n    causal: true")
    assert parse_recipe(both).variant("one").causal
    path = tmp_path / "mine.yaml"
    path.write_text(TEXT)
    assert load_recipe(path) == load_recipe(str(path)) == parse_recipe(TEXT)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("    width: 32", "    widht: 32", "mine.yaml, line 10: unknown key models[0].widht; did you mean 'width'? "),
        ("name: tiny", "name: tiny\noptimization: 3", "line 2: unknown key optimization; did you mean 'optimisation'?"),
        ("kind: bpe", "knd: bpe", "line 3: unknown key data.tokenizer.knd; did you mean 'kind'?"),
        ("name: tiny", "name: tiny\nzzz: 3", "line 2: unknown key zzz; known: about, checkpoints, compile, data,"),
        ("lr: 1e-3", "lr: fast", "line 15: optimisation.lr is 'fast'; input should be a valid number"),
        ("lr: 1e-3", "lr: -1.0", "line 15: optimisation.lr is -1.0; input should be greater than 0"),
        ("steps: 10", "steps: yes", "line 13: optimisation.steps is True; input should be a valid integer"),
        ("steps: 10", "steps: 10.5", "line 13: optimisation.steps is 10.5; input should be a valid integer"),
        ("steps: 10", "steps: 10\n  warmup_steps: 11", "optimisation: warmup_steps 11 is more than all 10 steps"),
        ("batch_size: 4", "batch_size: 4\n  accumulation: 3", "batch_size 4 is not a multiple of accumulation 3"),
        ("  batch_size: 4\n", "", "line 12: optimisation.batch_size is missing"),
        ("architecture: gpt2", "architecture: gpt3", "models[0].architecture is 'gpt3'; input should be 'gpt2', "),
        ("rank: 8", "rank: 64", "monitor asks for rank 64, but model 'one' is 32 wide; a rank is the width at most"),
        ("heads: 4", "heads: 5", "line 6: models[0]: width 32 is not a multiple of heads 5"),
        (
            "objective: causal",
            "objective: causal\n    causal: false",
            "lets a position see the token it should predict",
        ),
        ("vocab_size: 300", "vocab_size: 256", "data.tokenizer: byte-level BPE needs vocab_size, 257 or more"),
        ("kind: bpe", "kind: char", "characters are as many as the corpus has; leave vocab_size out"),
        ("name: tiny", "name: tiny\nseeds: [1, 2, 1]", "seed 1 stands twice"),
        ("name: tiny", "name: tiny\nseeds: []", "line 2: seeds is []; list should have at least 1 item"),
        ("name: tiny", "name: tiny\ncompile: maybe", "line 2: compile is 'maybe'; input should be a valid boolean"),
        ("name: tiny", "name: ../up", "line 1: name is '../up'; string should match pattern"),
        ("  - name: one", "    name: one", "line 5: models is {'name': 'one', 'architecture': 'gpt2',"),
        ("name: tiny", "name: [tiny", "line 2: not YAML"),
    ],
)
def test_mistakes_are_told_in_one_line(tmp_path, old, new, message):
    assert old in TEXT
    path = tmp_path / "mine.yaml"
    path.write_text(TEXT.replace(old, new, 1))
    with pytest.raises(OptionError) as caught:
        load_recipe(path)
    said = str(caught.value)
    assert message in said and "mine.yaml" in said and "\n" not in said
    assert "(and" not in said or "widht" in said or "knd" in said  # one mistake is not told as two


def test_files_and_names_that_are_not_there(tmp_path):
    with pytest.raises(UnknownNameError, match="unknown recipe 'dmeo'; did you mean 'demo'"):
        load_recipe("dmeo")
    with pytest.raises(OptionError, match=r"nothing\.yaml: no such recipe file; or give a name: .*demo"):
        load_recipe(tmp_path / "nothing.yaml")
    (tmp_path / "list.yaml").write_text("- 1\n- 2\n")
    with pytest.raises(OptionError, match="a recipe is a mapping of keys to values, got list"):
        load_recipe(tmp_path / "list.yaml")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(OptionError, match="cannot be read as text"):
        load_recipe(tmp_path / "bytes.yaml")
    with pytest.raises(UnknownNameError, match="unknown model of the recipe 'onne'; did you mean 'one'"):
        parse_recipe(TEXT).variant("onne")


def test_overrides_are_checked_like_the_rest():
    recipe = parse_recipe(TEXT)
    changed = override(recipe, {"optimisation.steps": 20, "models.0.width": 64, "monitor.tangent.rank": 4})
    assert (changed.optimisation.steps, changed.models[0].width, changed.monitor.tangent.rank) == (20, 64, 4)
    assert recipe.optimisation.steps == 10
    for key, value, message in (
        ("optimisation.stpes", 1, "unknown key optimisation.stpes; did you mean 'steps'"),
        ("optimise.steps", 1, "optimise.steps: the recipe has no 'optimise' there"),
        ("models.3.width", 1, "models.3.width: the recipe has no '3' there"),
        ("optimisaton.steps", 1, "the recipe has no 'optimisaton' there; did you mean 'optimisation'"),
        ("models.onne.width", 1, "the recipe has no 'onne' there; did you mean 'one'"),
        ("monitor.schedul.every", 1, "the recipe has no 'schedul' there; did you mean 'schedule'"),
        ("name.first", 1, "name.first: the recipe has no 'first' there$"),
        ("optimisation.lr", "x", "optimisation.lr is 'x'"),
    ):
        with pytest.raises(OptionError, match=message):
            override(recipe, {key: value})


def test_the_rate_rises_and_falls():
    plan = OptimisationSpec(steps=100, batch_size=1, lr=0.5, warmup_steps=10, min_lr_share=0.2)
    rates = [learning_rate(plan, step) for step in range(1, 101)]
    assert rates[0] == pytest.approx(0.05) and rates[9] == pytest.approx(0.5) == max(rates)
    assert rates[-1] == pytest.approx(0.1)
    assert rates[54] == pytest.approx(0.5 * (0.2 + 0.8 / 2))  # half of the way down, at half of the time
    assert all(a < b for a, b in pairwise(rates[:10])) and all(a > b for a, b in pairwise(rates[9:]))
    flat = plan.model_copy(update={"schedule": "constant"})
    assert {learning_rate(flat, step) for step in range(10, 101)} == {0.5}
    alone = OptimisationSpec(steps=1, batch_size=1, lr=0.5, warmup_steps=1)
    assert math.isclose(learning_rate(alone, 1), 0.5)


def test_checkpoints_fall_where_they_should():
    assert checkpoint_steps(CheckpointSpec(), 50) == {50}
    assert checkpoint_steps(CheckpointSpec(every=20), 50) == {20, 40, 50}
    assert checkpoint_steps(CheckpointSpec(log_spaced=True), 20) == {0, 1, 2, 4, 8, 16, 20}


def test_a_recipe_of_the_package_may_be_called_by_its_file():
    assert load_recipe("recipes/regularizers.yaml") == load_recipe("regularizers")
    with pytest.raises(OptionError, match=r"recipes/nothing\.yaml"):
        load_recipe("recipes/nothing.yaml")
