"""Score retrievers and run files: metrics, answer accuracy, benchmarks, significance tests."""
