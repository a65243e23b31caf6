"""The pinning benchmark: cells measured in child processes, their record, its table and page, and comparisons."""
