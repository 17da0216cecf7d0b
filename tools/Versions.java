import java.lang.reflect.Method;

/** Prints key, name, first and last version of what a release takes; its API changed over time. */
public class Versions {
  static Object ask(Object key, String name, Object otherwise) {
    try { return key.getClass().getMethod(name).invoke(key); }
    catch (ReflectiveOperationException error) { return otherwise; }
  }
  static Object look(Object key, String name, Object otherwise) {
    try { return key.getClass().getField(name).get(key); }
    catch (ReflectiveOperationException error) { return otherwise; }
  }
  static Object last(Object key) throws Exception {
    try { return key.getClass().getMethod("latestVersion", boolean.class).invoke(key, false); }
    catch (NoSuchMethodException error) { return ask(key, "latestVersion", null); }
  }
  // Before 0.11 an API's versions are the schemas that a table has of it.
  static Object[] schemas(Object key) throws Exception {
    try {
      Class<?> protocol = Class.forName("org.apache.kafka.common.protocol.Protocol");
      Object[][] all = (Object[][]) protocol.getField("REQUESTS").get(null);
      Object[] found = all[(Short) look(key, "id", null)];
      return found == null ? new Object[0] : found;
    } catch (NoSuchFieldException error) { return null; }
  }
  public static void main(String[] arguments) throws Exception {
    Class<?> keys = Class.forName("org.apache.kafka.common.protocol.ApiKeys");
    for (Object key : keys.getEnumConstants()) {
      boolean enabled = (Boolean) look(key, "isEnabled", true);
      Object[] schemas = schemas(key);
      int first = 0;
      while (schemas != null && first < schemas.length && schemas[first] == null) first++;
      System.out.println(look(key, "id", null) + " " + look(key, "name", null) + " "
          + (schemas != null ? first + " " + (schemas.length - 1)
              : ask(key, "oldestVersion", null) + " " + (enabled ? last(key) : "-1")));
    }
  }
}
