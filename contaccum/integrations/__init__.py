"""Use CONTACCUM in sentence-transformers and Lightning, and upload models to the Hub."""
