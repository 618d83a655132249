"""Steps on pipelines that differ from the mesh's and from each other (Hydraulis), off by default.

``WLBStrategy(dynamic=...)`` turns it on. It is attached at two seams: the planner asks a
:class:`.StepChooser` for each step (:class:`.Pool`, in ``planning/``, which imports no torch), and
the executor asks :class:`.HeterogeneousPipelines` what a step with schemes of its own runs on.
Nothing below imports this room. Begin with :mod:`.setup`.
"""
