"""Building blocks of ``scripts/train_demo_model.py``, one idea per file."""
