"""kvt: pages of cold tiers at one to two bits a value, by a transform that is learned from text."""
