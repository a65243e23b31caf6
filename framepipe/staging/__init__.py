"""The built-in staging, one file each; the module's name is the YAML name."""
