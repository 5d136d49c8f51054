"""Models, data and the algorithm: what is trained, on what, and how. See README.md in this folder.

Nothing is imported here: `recipes.recipe` needs pydantic only and answers at once, `recipes.data`
and `recipes.flat` need torch, and only what opens a model or a tokenizer needs transformers.
"""
