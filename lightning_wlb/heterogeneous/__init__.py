"""Steps on pipelines that differ from the mesh's and from each other (Hydraulis), off by default.

``WLBStrategy(dynamic=...)`` turns it on. It is attached at two places: the planner asks a
:class:`.StepChooser` for each step (:class:`.Pool`, in ``planning/``, which imports no torch), and
the executor asks :class:`.HeterogeneousPipelines` for the stage and the groups of a step that has
schemes. No lower package imports this one. Begin with :mod:`.setup`.
"""
