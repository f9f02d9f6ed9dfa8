"""Pictures of what was measured, from local runs or a Determined master."""
