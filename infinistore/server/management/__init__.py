"""The management API: HTTP for operators, probes and scrapers."""
