"""Readers and writers of records in every file format.

Error messages name the file and the line.
"""
