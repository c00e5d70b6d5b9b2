"""The compiled programs: what they are, how they are made, kept and found again."""
