"""What users hold in their hands, turned into arrays; the libraries themselves are not imported."""
