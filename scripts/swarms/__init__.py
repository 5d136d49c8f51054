"""Harnesses of real processes that measurements and tests share."""
