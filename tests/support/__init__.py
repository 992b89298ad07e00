"""What several tests share: models, cases, ranks, judges."""
