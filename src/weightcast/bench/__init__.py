"""What deltas are measured on and compared with: trained weights, generated weights, and the codecs of others."""
