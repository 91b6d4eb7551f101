-- Users for relays and for the web, with the rights of roles.sql. For psql, with the variables `relay` and `web`, which
-- are their passwords. Safe to repeat. For a dashboard that only shows, write relaybox_viewer for shop_web.
SELECT format('CREATE ROLE %I LOGIN', name) FROM (VALUES ('shop_relay'), ('shop_web')) AS users(name)
WHERE NOT EXISTS (SELECT FROM pg_roles WHERE rolname = name) \gexec
ALTER ROLE shop_relay PASSWORD :'relay';
ALTER ROLE shop_web PASSWORD :'web';
GRANT relaybox_relay TO shop_relay, shop_web;
