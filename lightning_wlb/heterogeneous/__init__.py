"""Steps on pipelines that differ from the mesh and from each other (Hydraulis)."""
