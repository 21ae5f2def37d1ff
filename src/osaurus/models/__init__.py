"""Model families: one file a family, found by `model_type` through `registry`."""
