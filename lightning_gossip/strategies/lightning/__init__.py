"""What stands between Lightning and a fit: processes, launchers, validation of options, replacements in its objects."""
