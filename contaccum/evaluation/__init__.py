"""From a ranked run to figures: BEIR's metrics, DPR's answer accuracy, and the benchmark's data sets by name."""
