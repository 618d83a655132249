"""The last module that the fork server imports: collections of garbage leave out what was before.

A collection looks at every object, and copies each page that it looks at into the forked rank. A
short run on two ranks took 0.77 s of processor time per rank, and so takes 0.48 s.
"""

import gc

gc.collect()
gc.freeze()
