"""Parameters: declared by letters, read from checkpoints, sharded over a mesh. Knows no model."""
