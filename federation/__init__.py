"""The contract that server and sites share: settings, registry, wire, metrics, seeding."""
