"""What all APIs share on the way from a body to results of the engine: the stages, and the parts of them.

Nothing here knows an API: each has a folder of its own, and uses what is here.
"""
