"""Score retrievers and run files: metrics of BEIR, answer accuracy of DPR, benchmarks, and significance tests."""
