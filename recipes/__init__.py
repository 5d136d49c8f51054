"""Models, data and the algorithm: what is trained, on what, and how.

Public names are resolved when they are asked for, so that `import recipes` costs nothing: `Recipe` needs pydantic
only, `Corpus` and `Flat` need torch, and only loading a model needs transformers.
"""
