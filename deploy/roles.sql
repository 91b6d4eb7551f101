-- What `relaybox sql --grants --dialect postgresql` prints. Run it as the owner of the tables, after `relaybox migrate`.
DO $$ BEGIN
    CREATE ROLE "relaybox_emitter" NOLOGIN;
EXCEPTION WHEN duplicate_object OR unique_violation THEN NULL;
END $$;
DO $$ BEGIN
    CREATE ROLE "relaybox_relay" NOLOGIN;
EXCEPTION WHEN duplicate_object OR unique_violation THEN NULL;
END $$;
DO $$ BEGIN
    CREATE ROLE "relaybox_viewer" NOLOGIN;
EXCEPTION WHEN duplicate_object OR unique_violation THEN NULL;
END $$;
DO $$ BEGIN
    CREATE ROLE "relaybox_consumer" NOLOGIN;
EXCEPTION WHEN duplicate_object OR unique_violation THEN NULL;
END $$;
REVOKE INSERT ON "outbox_event" FROM "relaybox_emitter";
REVOKE UPDATE, DELETE ON "outbox_audit" FROM "relaybox_relay";
GRANT INSERT (id, event_id, destination, aggregate_type, aggregate_id, event_type, payload, payload_data, payload_encoding, headers, ordering_key, idempotency_key, max_attempts, next_attempt_at) ON "outbox_event" TO "relaybox_emitter";
GRANT SELECT, INSERT ON "outbox_idempotency" TO "relaybox_emitter";
GRANT SELECT ON "outbox_migration" TO "relaybox_emitter";
GRANT SELECT, INSERT, UPDATE, DELETE ON "outbox_event" TO "relaybox_relay";
GRANT SELECT, INSERT, UPDATE, DELETE ON "outbox_idempotency" TO "relaybox_relay";
GRANT SELECT, INSERT, UPDATE, DELETE ON "outbox_attempt" TO "relaybox_relay";
GRANT SELECT, INSERT, UPDATE, DELETE ON "outbox_destination" TO "relaybox_relay";
GRANT SELECT, INSERT, UPDATE, DELETE ON "outbox_relay" TO "relaybox_relay";
GRANT SELECT, INSERT, UPDATE, DELETE ON "outbox_leader" TO "relaybox_relay";
GRANT SELECT, INSERT ON "outbox_audit" TO "relaybox_relay";
GRANT SELECT, INSERT, UPDATE, DELETE ON "outbox_stats" TO "relaybox_relay";
GRANT SELECT, INSERT, UPDATE, DELETE ON "inbox_message" TO "relaybox_relay";
GRANT SELECT, INSERT, UPDATE, DELETE ON "outbox_sample" TO "relaybox_relay";
GRANT SELECT, INSERT, UPDATE, DELETE ON "outbox_operation" TO "relaybox_relay";
GRANT SELECT, INSERT, UPDATE, DELETE ON "outbox_setting" TO "relaybox_relay";
GRANT SELECT ON "outbox_migration" TO "relaybox_relay";
GRANT SELECT ON "outbox_event" TO "relaybox_viewer";
GRANT SELECT ON "outbox_idempotency" TO "relaybox_viewer";
GRANT SELECT ON "outbox_attempt" TO "relaybox_viewer";
GRANT SELECT ON "outbox_destination" TO "relaybox_viewer";
GRANT SELECT ON "outbox_relay" TO "relaybox_viewer";
GRANT SELECT ON "outbox_leader" TO "relaybox_viewer";
GRANT SELECT ON "outbox_audit" TO "relaybox_viewer";
GRANT SELECT ON "outbox_stats" TO "relaybox_viewer";
GRANT SELECT ON "inbox_message" TO "relaybox_viewer";
GRANT SELECT ON "outbox_sample" TO "relaybox_viewer";
GRANT SELECT ON "outbox_operation" TO "relaybox_viewer";
GRANT SELECT ON "outbox_setting" TO "relaybox_viewer";
GRANT SELECT ON "outbox_migration" TO "relaybox_viewer";
GRANT SELECT, INSERT (consumer, message_id), UPDATE (processed_at), DELETE ON "inbox_message" TO "relaybox_consumer";
