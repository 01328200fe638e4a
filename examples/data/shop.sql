-- What every tenant of the example has: products, and the orders for them.
CREATE TABLE product (id INTEGER PRIMARY KEY, name TEXT NOT NULL, cents INTEGER NOT NULL);
CREATE TABLE orders (id INTEGER PRIMARY KEY, product INTEGER NOT NULL REFERENCES product, count INTEGER NOT NULL);
INSERT INTO product (name, cents) VALUES
    ('bolt M6', 12), ('nut M6', 7), ('washer', 3), ('bulkhead fitting', 1890), ('hatch', 24900), ('gasket', 420);
WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 500)
INSERT INTO orders (product, count) SELECT 1 + (i * 7) % 6, 1 + (i * 13) % 20 FROM n;
