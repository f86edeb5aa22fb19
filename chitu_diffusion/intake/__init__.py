"""Taking in a model that has no hook map: its reference, what the seams reach of it, and the map to write.

`target` finds the pipeline that a word stands for, `gap` says what the seams reach, `trial` runs it once, `draft` writes
the map, `upstream` and `weights` record the reference, `adapt` writes the files and `finish` checks the last of the walk.
"""
