"""Index arithmetic of parameters that rest on one mesh and are computed with on another."""
