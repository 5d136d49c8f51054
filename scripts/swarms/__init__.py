"""Harnesses that measurements and tests share: peers in lockstep, and real processes."""
