"""The files of a new deployment: from answers to a folder for every host (`prfaas init`)."""
