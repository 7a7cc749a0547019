"""Encode texts, search a corpus (exactly, approximately or with BM25), and mine hard negatives."""
