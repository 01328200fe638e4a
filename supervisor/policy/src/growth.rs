//! Grows small tables one entry at a time at first, to save memory. There can be thousands of bulkheads, and each has
//! several tables that rarely contain more than one entry.

/// Reserves memory for one more entry. The capacity starts at one and then doubles. The standard library would start at
/// four.
pub(crate) fn reserve_one<T>(table: &mut Vec<T>) {
    if table.len() == table.capacity() {
        table.reserve_exact(table.len().max(1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_capacity_starts_at_one_and_doubles() {
        let mut table = Vec::new();
        let mut grown = Vec::new();
        for number in 0..100 {
            reserve_one(&mut table);
            table.push(number);
            if grown.last() != Some(&table.capacity()) {
                grown.push(table.capacity());
            }
        }
        assert_eq!(grown, [1, 2, 4, 8, 16, 32, 64, 128]);
    }
}
