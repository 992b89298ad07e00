"""One function a verb. Whether a model is described or live is decided here, for all verbs alike."""
