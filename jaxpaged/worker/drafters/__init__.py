"""Where drafts come from: guesses at the next tokens of rows, which `worker/step/verify.py` verifies."""
