"""model -> Plan: what could be converted, what stays static and why, who shares a warehouse, and what that counts."""
