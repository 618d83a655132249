"""Lightning callbacks: how evenly the mesh works, measured."""
