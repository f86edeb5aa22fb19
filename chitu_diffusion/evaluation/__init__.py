"""Measuring what hooks do to a pipeline: parity of two runs, and how alike two pictures are."""
