"""Every place at which a step waits for the device, or would be frozen by a capture, found in one dry run."""
