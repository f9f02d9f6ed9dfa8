"""FP32, TF32, FP16 AMP and BF16 side by side: is AMP on, is it faster and smaller, is it safe?"""
