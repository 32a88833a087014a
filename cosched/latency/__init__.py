"""What an iteration is predicted to take: predictors, fitted to what was measured and calibrated
while running (docs/predict.md)."""
