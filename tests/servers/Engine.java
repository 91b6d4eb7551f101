import com.fasterxml.jackson.databind.ObjectMapper;
import io.debezium.embedded.Connect;
import io.debezium.engine.DebeziumEngine;
import io.debezium.engine.RecordChangeEvent;
import io.debezium.engine.format.ChangeEventFormat;
import java.io.PrintStream;
import java.io.Reader;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.Properties;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import org.apache.kafka.connect.header.Header;
import org.apache.kafka.connect.source.SourceRecord;
import org.apache.kafka.connect.storage.Converter;
import org.apache.kafka.connect.storage.HeaderConverter;

/**
 * Runs Debezium's engine with the properties in a file, and prints each record as a line of JSON: what Kafka
 * Connect would hand to Kafka, made by the converters that the properties name. Ends in order when its
 * standard input does.
 */
public class Engine {
    private static final ObjectMapper JSON = new ObjectMapper();
    private static final PrintStream LINES = new PrintStream(System.out, true, StandardCharsets.UTF_8);

    public static void main(String[] arguments) throws Exception {
        Properties properties = new Properties();
        try (Reader reader = Files.newBufferedReader(Path.of(arguments[0]))) {
            properties.load(reader);
        }
        Converter keys = converter(properties.getProperty("key.converter"), true);
        Converter values = converter(properties.getProperty("value.converter"), false);
        HeaderConverter headers = (HeaderConverter) made(properties.getProperty("header.converter"));
        headers.configure(Map.of("converter.type", "header"));
        DebeziumEngine<RecordChangeEvent<SourceRecord>> engine =
                DebeziumEngine.create(ChangeEventFormat.of(Connect.class))
                        .using(properties)
                        .notifying(event -> print(event.record(), keys, values, headers))
                        .using((success, message, error) -> {
                            if (!success) {
                                System.err.println(message);
                                if (error != null) {
                                    error.printStackTrace();
                                }
                                Runtime.getRuntime().halt(1);
                            }
                        })
                        .build();
        ExecutorService executor = Executors.newSingleThreadExecutor();
        executor.execute(engine);
        while (System.in.read() >= 0) {
            continue;
        }
        engine.close();
        executor.shutdown();
    }

    private static Object made(String name) throws ReflectiveOperationException {
        return Class.forName(name).getDeclaredConstructor().newInstance();
    }

    private static Converter converter(String name, boolean ofKeys) throws ReflectiveOperationException {
        Converter converter = (Converter) made(name);
        converter.configure(Map.of(), ofKeys);
        return converter;
    }

    private static void print(
            SourceRecord record, Converter keys, Converter values, HeaderConverter headers) {
        String topic = record.topic();
        Map<String, Object> line = new LinkedHashMap<>();
        line.put("topic", topic);
        line.put("key", text(keys.fromConnectData(topic, record.keySchema(), record.key())));
        line.put("value", text(values.fromConnectData(topic, record.valueSchema(), record.value())));
        Map<String, String> carried = new LinkedHashMap<>();
        for (Header header : record.headers()) {
            byte[] value = headers.fromConnectHeader(topic, header.key(), header.schema(), header.value());
            carried.put(header.key(), text(value));
        }
        line.put("headers", carried);
        try {
            LINES.println(JSON.writeValueAsString(line));
        } catch (java.io.IOException error) {
            throw new java.io.UncheckedIOException(error);
        }
    }

    private static String text(byte[] bytes) {
        return bytes == null ? null : new String(bytes, StandardCharsets.UTF_8);
    }
}
