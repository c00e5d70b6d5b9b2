"""Tools that measure, plan and draw. The engine imports nothing of this; commands import it when they run."""
