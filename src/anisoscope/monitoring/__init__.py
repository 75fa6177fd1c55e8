"""The parts of the monitor: what a look saw, how a probe is run without a trace, what is measured, how it is kept."""
