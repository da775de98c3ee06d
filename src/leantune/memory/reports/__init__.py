"""Profiles, their pages and pictures, and the calibration they leave."""
