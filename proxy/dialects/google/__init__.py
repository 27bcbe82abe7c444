"""Google Gemini: ``generateContent``, ``streamGenerateContent`` and ``countTokens``."""
