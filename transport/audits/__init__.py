"""Audits: now and then another peer computes the gradient of a sample that a peer says it has computed."""

from .audit_coordinator import AUDITED, AuditCoordinator
