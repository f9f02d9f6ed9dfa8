"""Parses experiment YAMLs into typed settings, and reports every mistake."""
