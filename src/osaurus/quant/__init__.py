"""Weight formats: one a file. A format is decoded once, at load, into grouped codes or a
dense tensor; a `Linear` then owns that form and decides itself where it dequantizes."""
