"""Models, data and the algorithm: what is trained, on what, and how. See README.md in this folder.

Nothing is imported here: `recipes.config` needs pydantic only and answers at once, `recipes.data` and
`recipes.weight_files` need torch, and only code that opens a model or a tokenizer needs transformers.
"""
